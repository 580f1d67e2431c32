"""Ranks as processes of this host: forked or launched (`ranks`), and what that takes of a process (`children`)."""
