"""A step's report: what lies on several devices becomes one number over ranks, and a bound nobody can check is refused."""

import statistics
from dataclasses import dataclass

import pytest
import torch

from rl_core.actors.reporting import StepMetrics
from rl_core.actors.schedule import OptimizerCounts
from rl_core.algorithms.stats import Stat, read_stats, std_stat
from rl_core.api.errors import ConfigError


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it lies on another device and, as there, is put together with its like only."""

    @property
    def device(self):
        return torch.device("cpu", 0)  # not equal to plain "cpu", and the only other device that every machine has

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.stack and len({type(part) for part in args[0]}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class TwoAlike:
    """Stands in for two ranks that hold the same."""

    size: int = 2

    def gather(self, structure):
        return [structure, structure]


def elsewhere(kind, total, count):
    on_device = (torch.tensor(value, dtype=torch.float64).as_subclass(Elsewhere) for value in (total, count))
    return Stat(kind, *on_device)


def here(kind, total, count):
    return Stat(kind, torch.tensor(total), torch.tensor(count))


def report_of(**stats):
    report = StepMetrics(OptimizerCounts())
    report.add_step([stats], norm=1.0, rate=0.1)
    return report


def test_statistics_of_several_devices_are_summed_over_ranks():
    report = report_of(ratio_mean=elsewhere("mean", 6.0, 4.0), ratio_max=elsewhere("max", 3.0, 4.0))
    report.add({"rewards/mean": here("mean", 1.0, 2.0), "rows/total": here("sum", 2.0, 1.0)})
    metrics = report.finish(TwoAlike(), tokens=8, seconds=1.0)
    found = [metrics[f"actor/{name}"] for name in ("ratio_mean", "ratio_max", "rewards/mean", "rows/total")]
    assert found == [1.5, 3.0, 0.5, 4.0]


def test_the_deviation_over_ranks_is_that_of_all_values_together():
    class TwoRanks:
        size = 2

        def gather(self, structure):
            other = read_stats({"rewards/std": std_stat(torch.tensor([4.0, 9.0]), torch.tensor([True, True]))})
            return [structure, other]

    report = StepMetrics(OptimizerCounts())
    report.add({"rewards/std": std_stat(torch.tensor([0.0, 1.0, 7.0]), torch.tensor([True, True, False]))})
    metrics = report.finish(TwoRanks(), tokens=8, seconds=1.0)
    assert metrics["actor/rewards/std"] == pytest.approx(statistics.stdev([0.0, 1.0, 4.0, 9.0]))


def test_counts_beyond_single_precision_are_counted_exactly():
    many = 2.0**24 + 1
    report = report_of(ratio_mean=Stat("mean", torch.tensor(many, dtype=torch.float64), torch.tensor(2**24 + 1)))
    assert report.finish(TwoAlike(), tokens=8, seconds=1.0)["actor/ratio_mean"] == 1.0


@pytest.mark.parametrize(("ratio", "kl", "ends"), [(1.4, None, True), (1.6, 0.2, False), (1.6, 0.05, True)])
def test_either_bound_ends_the_step(ratio, kl, ends):
    report = report_of(ratio_mean=here("mean", 6.0, 4.0), approx_kl=here("mean", 0.4, 4.0))
    assert report.exceeds(TwoAlike(), ratio=ratio, kl=kl) is ends is report.early_stopped


@pytest.mark.parametrize(("field", "bounds"), [("maxPolicyRatio", (2.0, None)), ("maxPolicyKl", (None, 0.1))])
def test_a_bound_on_what_the_loss_does_not_report_is_refused(field, bounds):
    report = report_of(policy_loss=here("sum", 1.0, 1.0))
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} needs a loss that reports"):
        report.exceeds(TwoAlike(), ratio=bounds[0], kl=bounds[1])
