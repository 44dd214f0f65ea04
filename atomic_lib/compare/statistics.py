# SPDX-License-Identifier: Apache-2.0
"""Two groups of training runs at the steps that all of them evaluated. Pure functions of rows.

For the runs i = 1..n of one architecture, x_i the validation bits per byte of run i:

    mean = sum x_i / n,   SD = sqrt(sum (x_i - mean)^2 / (n - 1))      (none for n = 1)

Time to a target t is read per run at its first logged evaluation with x <= t, without
interpolation, and then averaged. A pair is two runs, one of each architecture, with the same seeds.
Nothing here is a confidence interval.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEASURES = ("bpb_est", "bpb_exact")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of one run, in order of step. `seeds` are its seeds by name."""

    run_id: str
    architecture: str
    seeds: Mapping[str, int]
    tokens_per_step: int
    evaluations: tuple[Row, ...]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], *, run_id: str, architecture: str, seeds: Mapping[str, int]
    ) -> "Curve":
        """Takes the header and the evaluations from the effective rows of a metrics.jsonl.

        Raises ValueError if there is no header row or no evaluation.
        """
        headers = [row for row in rows if row["kind"] == "header"]
        evaluations = tuple(row for row in rows if row["kind"] == "eval")
        if not headers or not evaluations:
            missing = "evaluation" if headers else "header"
            raise ValueError(f"run {run_id!r}: its metrics have no {missing} row.")
        return cls(
            run_id=run_id,
            architecture=architecture,
            seeds=dict(seeds),
            tokens_per_step=headers[0]["tokens_per_step"],
            evaluations=evaluations,
        )

    def at_step(self, step: int) -> Row:
        """The last evaluation logged at this step."""
        return next(row for row in reversed(self.evaluations) if row["step"] == step)

    def first_at_or_under(self, target: float) -> Row | None:
        """The first evaluation whose estimated bits per byte are at or under `target`."""
        reached = (row for row in self.evaluations if row["bpb_est"] is not None)
        return next((row for row in reached if row["bpb_est"] <= target), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Curves by architecture; the first architecture is the reference of every difference."""

    curves: Mapping[str, tuple[Curve, ...]]
    targets: tuple[float, ...]
    common_steps: tuple[int, ...]

    @property
    def reference(self) -> str:
        """The architecture that the others are compared with."""
        return next(iter(self.curves))

    @property
    def others(self) -> tuple[str, ...]:
        """Every architecture but the reference."""
        return tuple(self.curves)[1:]

    def values(self, architecture: str, measure: str, step: int) -> list[float] | None:
        """One value a run, or None if a run did not measure it at this step."""
        found = [curve.at_step(step).get(measure) for curve in self.curves[architecture]]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None

    def step_rows(self) -> list[dict[str, Any]]:
        """A row a common step: mean and SD of each measure and architecture, and differences."""
        return [self._step_row(step) for step in self.common_steps]

    def final_rows(self) -> list[dict[str, Any]]:
        """A row a measure at the last common step, as the headline table shows it."""
        last = self._step_row(self.common_steps[-1])
        rows = []
        for measure in MEASURES:
            if last[f"{self.reference} {measure}"] is None:
                continue
            row = {"measure": measure, "step": last["step"], "tokens": last["tokens"]}
            for name in self.curves:
                row[name] = last[f"{name} {measure}"]
                row[f"{name} SD"] = last[f"{name} {measure} SD"]
            for name in self.others:
                row[f"{name} − {self.reference}"] = last[f"{name} − {self.reference} {measure}"]
            rows.append(row)
        return rows

    def summary(self) -> dict[str, Any]:
        """The headline as results of a run: each difference at the last common step, and where."""
        last = self._step_row(self.common_steps[-1])
        differences = {
            f"{name} - {self.reference} {measure}": last[f"{name} − {self.reference} {measure}"]
            for name in self.others
            for measure in MEASURES
        }
        return {**differences, "common_steps": len(self.common_steps), "final": self.final_rows()}

    def _step_row(self, step: int) -> dict[str, Any]:
        tokens = self.curves[self.reference][0].tokens_per_step * step
        row: dict[str, Any] = {"step": step, "tokens": tokens}
        for measure in MEASURES:
            for name in self.curves:
                mean, deviation = mean_and_sd(self.values(name, measure, step))
                row[f"{name} {measure}"], row[f"{name} {measure} SD"] = mean, deviation
            for name in self.others:
                row[f"{name} − {self.reference} {measure}"] = _difference(
                    row[f"{name} {measure}"], row[f"{self.reference} {measure}"]
                )
        return row

    def target_rows(self) -> list[dict[str, Any]]:
        """A row a target: steps, tokens and seconds to it, and what the others save, in percent.

        Means over all runs of an architecture; None where a run did not get there (the column
        "reached" counts those that did).
        """
        return [self._target_row(target) for target in self.targets]

    def _target_row(self, target: float) -> dict[str, Any]:
        row: dict[str, Any] = {"target bpb_est ≤": target}
        for name, curves in self.curves.items():
            found = [curve.first_at_or_under(target) for curve in curves]
            reached = [point for point in found if point is not None]
            row[f"{name} reached"] = f"{len(reached)} of {len(curves)}"
            for column in ("step", "tokens", "elapsed_s"):
                values = (
                    [point[column] for point in reached] if len(reached) == len(found) else None
                )
                mean, deviation = mean_and_sd(values)
                row[f"{name} {column}"] = mean
                if column == "step":
                    row[f"{name} step SD"] = deviation
        for name in self.others:
            for column, saved in (("tokens", "fewer tokens %"), ("elapsed_s", "less time %")):
                ours, theirs = row[f"{name} {column}"], row[f"{self.reference} {column}"]
                both = ours is not None and theirs
                row[f"{name} {saved}"] = 100 * (1 - ours / theirs) if both else None
        return row

    def pair_rows(self) -> list[dict[str, Any]]:
        """A row a pair of runs with the same seeds: differences at the last common step.

        "lower at" counts the common steps at which the other run has the lower estimate.
        """
        rows = []
        last = self.common_steps[-1]
        for name in self.others:
            for ours in self.curves[name]:
                for theirs in self.curves[self.reference]:
                    if ours.seeds == theirs.seeds:
                        rows.append(self._pair_row(theirs, ours, last))
        return rows

    def _pair_row(self, theirs: Curve, ours: Curve, last: int) -> dict[str, Any]:
        lower = [
            ours.at_step(step)["bpb_est"] < theirs.at_step(step)["bpb_est"]
            for step in self.common_steps
        ]
        row: dict[str, Any] = {self.reference: theirs.run_id, ours.architecture: ours.run_id}
        for measure in MEASURES:
            pair = [curve.at_step(last).get(measure) for curve in (ours, theirs)]
            row[f"difference {measure}"] = _difference(*pair)
        row["lower at"] = f"{sum(lower)} of {len(lower)} steps"
        return row

    def learning_curves(self) -> dict[str, dict[str, tuple[Row, ...]]]:
        """The evaluation rows of each run by architecture and run name, for a figure."""
        return {
            name: {curve.run_id: curve.evaluations for curve in curves}
            for name, curves in self.curves.items()
        }

    def to_json(self) -> dict[str, Any]:
        """All tables, and which runs they are made from, as a JSON object."""
        return {
            "schema": "atomic-comparison/1",
            "runs": {
                name: [{"run_id": curve.run_id, "seeds": dict(curve.seeds)} for curve in curves]
                for name, curves in self.curves.items()
            },
            "common_steps": list(self.common_steps),
            "final": self.final_rows(),
            "targets": self.target_rows(),
            "pairs": self.pair_rows(),
            "steps": self.step_rows(),
        }


def mean_and_sd(values: Sequence[float] | None) -> tuple[float | None, float | None]:
    """Mean, and sample SD (ddof 1; None for fewer than two values). None gives (None, None)."""
    if not values:
        return None, None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return statistics.fmean(values), deviation


def compare_curves(
    curves: Mapping[str, Sequence[Curve]], *, targets: Sequence[float]
) -> Comparison:
    """Compares architectures (the first is the reference) at their common evaluation steps.

    A step is common if every run evaluated it with a finite loss. Raises ValueError if an
    architecture has no run, a run appears twice, runs differ in tokens a step or in what they were
    evaluated on, or no step is common.
    """
    every = [curve for group in curves.values() for curve in group]
    for name, group in curves.items():
        if not group:
            raise ValueError(f"{name}: no run to compare; name at least one.")
    names = [curve.run_id for curve in every]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"runs {twice} are named twice; each run counts once.")
    _require_equal(every, "tokens a step", [curve.tokens_per_step for curve in every])
    steps = [
        {row["step"] for row in curve.evaluations if row["bpb_est"] is not None} for curve in every
    ]
    common = tuple(sorted(set.intersection(*steps)))
    if not common:
        logged = "; ".join(
            f"{c.run_id}: {sorted(s)[:5]}..." for c, s in zip(every, steps, strict=True)
        )
        raise ValueError(f"no step was evaluated by every run ({logged}); use one eval_every.")
    for step in common:
        targets_seen = [curve.at_step(step)["target_tokens"] for curve in every]
        _require_equal(every, f"validation target tokens at step {step}", targets_seen)
    return Comparison(
        curves={name: tuple(group) for name, group in curves.items()},
        targets=tuple(targets),
        common_steps=common,
    )


def _require_equal(curves: Sequence[Curve], what: str, values: Sequence[int]) -> None:
    if len(set(values)) > 1:
        each = ", ".join(f"{c.run_id}: {v:,}" for c, v in zip(curves, values, strict=True))
        raise ValueError(f"runs cannot be compared: {what} differ ({each}).")


def _difference(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs
