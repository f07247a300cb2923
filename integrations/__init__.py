"""What plugs into other frameworks without patching them: DCP, Trainer, Lightning, DeepSpeed."""
