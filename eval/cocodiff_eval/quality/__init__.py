"""The quality of restorations: metrics, tests on hidden regions, and the fusion of several restorations."""
