"""`cocodiff doctor`: every rank gathers facts, and checks judge them."""
