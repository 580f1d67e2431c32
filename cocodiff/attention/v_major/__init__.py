"""V-Major (CoCoDiff section III-D): only tokens whose v changed are sent. Others use `codec.VMajor`."""
