"""What commands read and say: their options (`options`), and the terminal (`terminal`)."""
