"""`cocodiff doctor`: every rank gathers facts about the machine, and checks judge them."""
