"""The CustomResourceDefinition of RLJob, made from rl_core.api: `python -m rljob_operator.crd [--check]` writes crds/rljob.yaml."""
