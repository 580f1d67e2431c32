"""How good a restoration is: metrics, hidden regions, and several restorations as one."""
