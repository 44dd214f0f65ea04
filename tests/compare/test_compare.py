# SPDX-License-Identifier: Apache-2.0
"""The comparison of runs: means, deviations, targets, pairs, and which runs it refuses.

Oracle: the tables that Atomic-GDN2 published for its two seeds an architecture (final estimate,
steps to four targets, fewer tokens). Learning curves are made here that pass through those numbers,
and the aggregation must print the published figures to their last digit.
"""

import itertools
import json
import shutil

import pytest

from atomic_lib.compare import Curve, compare, compare_curves, mean_and_sd
from atomic_lib.config import CompareConfig
from atomic_lib.evidence import RunFolder

EVERY = 1_500
COMMON = 41  # evaluations that all four published runs share: 1,500 .. 61,500
TOKENS_PER_STEP = 32 * 2_048

# target -> first step at or under it, per run
CROSSINGS = {
    "baseline-1": {1.10: 19_500, 1.08: 25_500, 1.06: 31_500, 1.02: 49_500},
    "baseline-2": {1.10: 21_000, 1.08: 25_500, 1.06: 31_500, 1.02: 51_000},
    "hybrid-1": {1.10: 16_500, 1.08: 21_000, 1.06: 27_000, 1.02: 42_000},
    "hybrid-2": {1.10: 16_500, 1.08: 21_000, 1.06: 27_000, 1.02: 42_000},
}
# Estimates at step 61,500 with the published means and sample SDs (mean ± SD / sqrt 2).
FINAL = {
    "baseline-1": 1.0060695,
    "baseline-2": 1.0057485,
    "hybrid-1": 0.9939165,
    "hybrid-2": 0.9937595,
}
SECONDS_PER_STEP = {"baseline": 0.50, "hybrid": 0.53}


def curve_rows(name, *, evaluations=COMMON):
    """Falling estimates that cross each target at its step and end at FINAL."""
    knots = [(EVERY, 1.5), *((step, target) for target, step in CROSSINGS[name].items())]
    knots.append((EVERY * COMMON, FINAL[name]))
    rows = [{"kind": "header", "tokens_per_step": TOKENS_PER_STEP}]
    for index in range(1, evaluations + 1):
        step = index * EVERY
        left, right = next(
            ((a, b) for a, b in itertools.pairwise(knots) if a[0] <= step <= b[0]),
            (knots[-2], knots[-1]),
        )
        share = min(1.0, (step - left[0]) / (right[0] - left[0]))
        rows.append(
            {
                "kind": "eval",
                "step": step,
                "tokens": step * TOKENS_PER_STEP,
                "bpb_est": left[1] + share * (right[1] - left[1]),
                "target_tokens": 4_390_912,
                "elapsed_s": step * SECONDS_PER_STEP[name.split("-")[0]],
            }
        )
    return rows


def curve(name, rows=None):
    architecture, seed = name.split("-")
    return Curve.from_rows(
        curve_rows(name) if rows is None else rows,
        run_id=name,
        architecture=architecture,
        seeds={"init_seed": int(seed), "data_seed": 42 + int(seed)},
    )


@pytest.fixture
def published():
    # The Baseline runs were evaluated further than the hybrid ones: those steps are not common.
    return compare_curves(
        {
            "baseline": [curve(n, curve_rows(n, evaluations=43)) for n in FINAL if n[0] == "b"],
            "hybrid": [curve(n) for n in FINAL if n[0] == "h"],
        },
        targets=(1.10, 1.08, 1.06, 1.02),
    )


def test_common_steps_are_those_of_every_run(published):
    assert published.common_steps == tuple(EVERY * i for i in range(1, COMMON + 1))


def test_the_published_final_table(published):
    (row,) = published.final_rows()  # one measure: these rows have no exact bits per byte
    assert row["measure"] == "bpb_est"
    assert row["step"] == 61_500
    assert row["tokens"] == 4_030_464_000
    assert f"{row['baseline']:.6f} ± {row['baseline SD']:.6f}" == "1.005909 ± 0.000227"
    assert f"{row['hybrid']:.6f} ± {row['hybrid SD']:.6f}" == "0.993838 ± 0.000111"
    assert f"{row['hybrid − baseline']:.6f}" == "-0.012071"


@pytest.mark.parametrize(
    ("target", "baseline", "hybrid", "fewer"),
    [
        (1.10, "20,250 ± 1,061", "16,500 ± 0", "18.52"),
        (1.08, "25,500 ± 0", "21,000 ± 0", "17.65"),
        (1.06, "31,500 ± 0", "27,000 ± 0", "14.29"),
        (1.02, "50,250 ± 1,061", "42,000 ± 0", "16.42"),
    ],
)
def test_the_published_target_table(published, target, baseline, hybrid, fewer):
    row = next(row for row in published.target_rows() if row["target bpb_est ≤"] == target)
    for name, text in (("baseline", baseline), ("hybrid", hybrid)):
        assert f"{row[f'{name} step']:,.0f} ± {row[f'{name} step SD']:,.0f}" == text
        assert row[f"{name} tokens"] == row[f"{name} step"] * TOKENS_PER_STEP
        assert row[f"{name} reached"] == "2 of 2"
    assert f"{row['hybrid fewer tokens %']:.2f}" == fewer
    seconds = 1 - 0.53 * row["hybrid step"] / (0.50 * row["baseline step"])
    assert row["hybrid less time %"] == pytest.approx(100 * seconds, rel=1e-12)


def test_pairs_are_runs_of_equal_seeds(published):
    rows = published.pair_rows()
    assert [(row["baseline"], row["hybrid"]) for row in rows] == [
        ("baseline-1", "hybrid-1"),
        ("baseline-2", "hybrid-2"),
    ]
    for row, seed in zip(rows, (1, 2), strict=True):
        want = FINAL[f"hybrid-{seed}"] - FINAL[f"baseline-{seed}"]
        assert row["difference bpb_est"] == pytest.approx(want, rel=1e-12)
        assert row["difference bpb_exact"] is None
        # At the first step all four curves start at 1.5.
        assert row["lower at"] == "40 of 41 steps"


def test_one_run_has_no_deviation():
    assert mean_and_sd([3.0]) == (3.0, None)
    assert mean_and_sd([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_and_sd(None) == (None, None)


def test_a_target_that_one_run_missed_has_no_mean():
    late = curve_rows("baseline-2", evaluations=20)  # ends at step 30,000, above 1.06
    comparison = compare_curves(
        {
            "baseline": [curve("baseline-1"), curve("baseline-2", late)],
            "hybrid": [curve("hybrid-1")],
        },
        targets=(1.06,),
    )
    (row,) = comparison.target_rows()
    assert row["baseline reached"] == "1 of 2"
    assert row["baseline step"] is None
    assert row["hybrid step"] == 27_000
    assert row["hybrid fewer tokens %"] is None


def test_crossing_is_the_first_evaluation_at_or_under_without_interpolation():
    rows = curve_rows("baseline-1")
    for row, estimate in zip(rows[1:], [1.3, 1.2, 1.25, 1.2, 1.1], strict=False):
        row["bpb_est"] = estimate
    found = curve("baseline-1", rows)
    assert found.first_at_or_under(1.2)["step"] == 2 * EVERY
    assert found.first_at_or_under(1.19)["step"] == 5 * EVERY
    assert found.first_at_or_under(0.1) is None


def test_a_step_with_a_loss_that_is_not_finite_is_not_common():
    rows = curve_rows("hybrid-1")
    rows[5]["bpb_est"] = None
    comparison = compare_curves(
        {"baseline": [curve("baseline-1")], "hybrid": [curve("hybrid-1", rows)]}, targets=()
    )
    assert rows[5]["step"] not in comparison.common_steps
    assert len(comparison.common_steps) == COMMON - 1


def _changed(name, key, value, *, kind="eval"):
    rows = curve_rows(name)
    for row in rows:
        if row["kind"] == kind:
            row[key] = value
    return curve(name, rows)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda: {"baseline": [curve("baseline-1")], "hybrid": []}, "hybrid: no run to compare"),
        (lambda: {"baseline": [curve("baseline-1")] * 2, "hybrid": [curve("hybrid-1")]},
         r"\['baseline-1'\] are named twice"),
        (lambda: {"baseline": [curve("baseline-1")],
                  "hybrid": [_changed("hybrid-1", "target_tokens", 100)]},
         r"validation target tokens at step 1500 differ .*hybrid-1: 100"),
        (lambda: {"baseline": [curve("baseline-1")],
                  "hybrid": [_changed("hybrid-1", "tokens_per_step", 8, kind="header")]},
         r"tokens a step differ \(baseline-1: 65,536, hybrid-1: 8\)"),
        (lambda: {"baseline": [curve("baseline-1")], "hybrid": [_changed("hybrid-1", "step", 7)]},
         "no step was evaluated by every run"),
    ],
    ids=["none", "twice", "targets", "tokens", "steps"],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        compare_curves(groups(), targets=())


@pytest.mark.parametrize("kept", ["header", "eval"])
def test_metrics_without_header_or_evaluation_are_refused(kept):
    missing = {"header": "evaluation", "eval": "header"}[kept]
    rows = [row for row in curve_rows("hybrid-1") if row["kind"] == kept]
    with pytest.raises(ValueError, match=f"hybrid-1.*no {missing} row"):
        curve("hybrid-1", rows)


# --- the entry point, on run folders -------------------------------------------------------------


def finished_run(outputs, name, **parameters):
    """A verified training run folder with the evaluations of `curve_rows`."""
    seed = int(name[-1])
    values = {
        "corpus": "builtin", "sequence_length": 2048, "init_seed": seed, "data_seed": 42 + seed,
        **parameters,
    }  # fmt: skip
    run = RunFolder.open(
        outputs / name, notebook="train", parameters=values,
        origins=dict.fromkeys(values, "default"), root=outputs,
    )  # fmt: skip
    header, *evaluations = curve_rows(name)
    run.metrics.start(run_id=name, tokens_per_step=header["tokens_per_step"])
    for row in evaluations:
        nats = row["bpb_est"] * 4.2 * 0.6931471805599453
        fields = {key: value for key, value in row.items() if key != "kind"}
        run.metrics.append("eval", **fields, ce=nats, batches=67)
    run.succeed("completed")


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    for name in FINAL:
        finished_run(folder, name)
    return folder


@pytest.fixture
def outputs(finished_runs, tmp_path):
    return shutil.copytree(finished_runs, tmp_path / "outputs")


def open_comparison(outputs):
    return RunFolder.open(
        outputs / "compare-test", notebook="compare", parameters={}, origins={}, root=outputs
    )


CONFIG = CompareConfig(
    run="test", baseline=("baseline-1", "baseline-2"), hybrid=("hybrid-1", "hybrid-2")
)


def test_runs_on_disk_give_the_published_table_and_a_json_file(outputs):
    run = open_comparison(outputs)
    comparison = compare(run, CONFIG)
    assert f"{comparison.final_rows()[0]['hybrid − baseline']:.6f}" == "-0.012071"
    written = json.loads((run.path / "comparison.json").read_text())
    assert written["targets"] == comparison.target_rows()
    assert len(written["steps"]) == COMMON
    assert written["runs"]["hybrid"][1] == {
        "run_id": "hybrid-2",
        "seeds": {"init_seed": 2, "data_seed": 44},
    }


def test_a_missing_run_names_the_runs_there(outputs):
    config = CompareConfig(run="test", baseline=("baseline-9",), hybrid=("hybrid-1",))
    with pytest.raises(FileNotFoundError, match=r"'baseline-9' is not in .*baseline-1, baseline-2"):
        compare(open_comparison(outputs), config)


def test_an_altered_run_is_refused(outputs):
    path = outputs / "hybrid-2" / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"elapsed_s": 795', b'"elapsed_s": 794', 1))
    with pytest.raises(ValueError, match=r"'hybrid-2' is not verified.*metrics\.jsonl"):
        compare(open_comparison(outputs), CONFIG)


def test_runs_on_other_text_are_refused(outputs):
    shutil.rmtree(outputs / "hybrid-1")
    finished_run(outputs, "hybrid-1", corpus="other.txt")
    with pytest.raises(ValueError, match=r"corpus differs .*'hybrid-1': 'other\.txt'"):
        compare(open_comparison(outputs), CONFIG)
