"""`cocodiff doctor`: facts are gathered on every rank, and checks judge them."""
