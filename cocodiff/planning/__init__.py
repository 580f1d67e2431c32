"""What runs would take of time and bytes, by the strategies themselves on a machine that is only described."""
