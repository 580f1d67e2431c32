"""A folder of results: put in place whole (`folder`), journals (`journal`) and the record of its files (`manifest`)."""
