"""Jobs on ranks.

`job` is the interface of every job, `session` and `running` run any of them. Three jobs: `slices` (restored volumes),
`images` (from prompts) and `sweep.runs`.
"""
