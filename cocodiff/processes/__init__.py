"""Ranks as processes of this host: forked or launched (`ranks`), and whether there is room for them (`room`)."""
