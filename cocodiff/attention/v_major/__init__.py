"""V-Major (CoCoDiff section III-D): only tokens whose v changed travel. Its face is `codec.VMajor`."""
