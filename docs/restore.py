"""Restores a hole in a volume from Python, as one would in a notebook: python docs/restore.py [steps]"""

import sys

import numpy as np
from scipy.ndimage import gaussian_filter

import cocodiff

# %% A volume [Z, Y, X], here smooth noise with a sharp edge, and what is missing of it: True, as in scikit-image.
rng = np.random.default_rng(0)
truth = gaussian_filter(rng.normal(size=(24, 64, 64)), 3)
truth = np.where(truth > 0.02, 40000, 20000) + rng.normal(0, 500, truth.shape)
volume = truth.astype(np.uint16)
z, y, x = np.ogrid[:24, :64, :64]
missing = ((z - 12) / 4) ** 2 + ((y - 32) / 10) ** 2 + ((x - 30) / 8) ** 2 < 1
volume[missing] = 0

# %% Four restorations of each slice, on two ranks of this host.
steps = int(sys.argv[1]) if len(sys.argv) > 1 else "auto"
restored = cocodiff.restore(volume, missing, samples=4, ranks=2, steps=steps, device="cpu")
print(restored.verdict)
print(restored.outcome)  # of restored.outcome.kind: "ahead", "tie", "as good" or "unknown"

# %% The mean, and how sure it is.
error = restored.mean.astype(float)[missing] - truth[missing]
inside = (restored.low_90[missing] <= truth[missing]) & (truth[missing] <= restored.high_90[missing])
print(f"error {np.sqrt((error**2).mean()):.0f}, {inside.mean():.0%} of the truth between low_90 and high_90")
