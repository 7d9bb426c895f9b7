"""What methods need to know of a model, measured: SkipVAR's decision models and ScaleKV's drafters."""
