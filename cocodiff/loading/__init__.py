"""Users' models: checked, loaded on ranks (`pipelines`), and their shapes alone (`model_shapes`)."""
