"""The Kubernetes operator of rljob. Imports rl_core.api and rl_core.plan only, never torch."""
