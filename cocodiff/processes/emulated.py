"""Whether this process is a rank of an emulated machine, and of which."""

from __future__ import annotations

import json
import os
from typing import Any

from cocodiff.errors import UserError

EMULATED = "COCODIFF_EMULATED"  # what ranks are told of the machine, as JSON


def emulated() -> dict[str, Any]:
    """On a rank of an emulation its "machine", "nodes" and "scale"; else nothing. Raises UserError."""
    try:
        return dict(json.loads(os.environ.get(EMULATED) or "{}"))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{EMULATED}={os.environ[EMULATED][:40]!r}: cocodiff emulate alone sets it: unset it"
        ) from error
