"""The ways a run ends early: a mistake the user can mend, and a peer that is gone."""


class UserError(ValueError):
    """A user's mistake: one line with the values and the remedy. The command line prints it and exits with 2."""


class OwnRankError(UserError):
    """A mistake that this rank alone may see, such as a device that is not there: it says so itself, whatever its
    number, and exits with 1."""


class PeerLost(RuntimeError):
    """Another rank died, failed or fell silent. The message names it; every survivor raises this and exits with 1."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason
