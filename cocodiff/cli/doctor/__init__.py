"""`cocodiff doctor`: facts are gathered on every rank, and checks judge them. Checks never touch a machine, so that a
test can hand them any faulty one."""
