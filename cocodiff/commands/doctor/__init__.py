"""What `cocodiff doctor` looks at: facts are gathered on every rank, checks judge them. Checks never touch a machine,
so that a test can hand them any faulty one."""
