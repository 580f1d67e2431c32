"""A setting of the tests' own: one field, of a dataclass that derives from Config.

Everything that commands do with settings starts at one dataclass, which the registry names by an import string, as it
names exchanges and orders. A test names its own there for as long as it runs: no parameter has to be passed through
every command for that, forked ranks see the entry too, and a setting comes as everything else that can be added.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff.config.config import Config
from cocodiff.config.setting import setting


@dataclass(frozen=True)
class ToyConfig(Config):
    zeal: int = setting(1, "how hard the toy tries", least=1, only_with=("order", "v_first", "toy"))
