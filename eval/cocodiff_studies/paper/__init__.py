"""The CoCoDiff paper's figures beside what the plan says of the same cases."""
