# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train the Baseline
#
# The Baseline is purely recurrent: each block is four GDN-2 mixers and a SwiGLU feed-forward layer. The run ends inside its budget and saves checkpoints on the way; run again, it goes on from the newest valid one.
#
# | | |
# |---|---|
# | needs | any CPU for `smoke`; a TPU v5e-8 for `seed1` and `seed2` |
# | wall time | `smoke` 2 to 3 min on 2 cores; a seed 8 h 54 min |
# | quota | a seed takes 9 of Kaggle's 20 TPU hours a week |
# | inputs | `smoke`: English text inside Python itself; a seed: `windmaple/openwebtext-gpt2`, attached |
# | outputs | `outputs/train_baseline-<run>/`: metrics, checkpoints, figures, evidence |

# %% [markdown]
# Finds the repository (here, above, just below, or attached to a Kaggle session), checks the packages before JAX is imported, and starts the budget's clock.

# %%
import sys
from pathlib import Path

here, attached = Path.cwd(), Path("/kaggle/input")
_places = [here, *here.parents, *here.glob("*")]
_places += [*attached.glob("*"), *attached.glob("datasets/*/*")]
root = next((place for place in _places if (place / "atomic_lib" / "__init__.py").is_file()), None)
if root is None:
    raise FileNotFoundError(f"no atomic_lib at, above or just below {here}: clone or attach it")
sys.path[:0] = [str(root)]
from atomic_lib.notebook import Session

session = Session.begin(root)

# %% [markdown]
# ## Parameters
# `run` chooses the parameter file `params/train_baseline/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.TrainConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" runs anywhere; "seed1" and "seed2" are the published protocol
preset: str = None  # the model: "atomic-baseline", "atomic-baseline-smoke", "atomic-baseline@50m"
corpus: str = None  # "builtin", "windmaple/openwebtext-gpt2", "huggingface:<name>" or a path
sequence_length: int = None  # tokens
batch_size: int = None  # sequences a step, over all devices
learning_rate: float = None  # peak, for both optimiser groups
schedule_unit: str = None  # what the schedule counts: "time", "steps" or "tokens"
budget_seconds: float = None  # wall clock from the first cell, finalisation included
max_steps: int = None  # optimiser steps
init_seed: int = None  # of the parameters
data_seed: int = None  # of the order of the data

# %%
loaded = session.read_parameters("train_baseline", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## Model and data
# The counts follow from the configuration and are checked against the model's shapes below.

# %%
from atomic_lib.notebook import show_model

show_model(config.model_config)

# %%
from atomic_lib.data import open_run_dataset
from atomic_lib.notebook import show_dataset

dataset = open_run_dataset(run_folder, config, root=session.root)
show_dataset(dataset, sequence_length=config.sequence_length)

# %% [markdown]
# ## Preflight
# Parameter count, memory, disk and data; the kernel against the token-by-token reference, gradients included. A failed check stops the run here, before the model is compiled.

# %%
from atomic_lib.notebook import show_table
from atomic_lib.preflight import check_runtime

show_table(check_runtime(run_folder, config, dataset), caption="Preflight")

# %% [markdown]
# ## Training
# Every step is a row of `metrics.jsonl`; this cell prints a line each half minute and, in an open notebook, redraws the curves each minute.

# %%
from atomic_lib.notebook import LiveCurves
from atomic_lib.train import train

live = LiveCurves(loaded.run_id)
result = train(run_folder, config, dataset, started_at=session.started_at, on_progress=live)

# %%
from atomic_lib.notebook import show_figure, training_curves

show_figure(run_folder, "training", training_curves(run_folder.metrics.rows(), title=loaded.run_id))

# %% [markdown]
# ## What it learned
# The validation loss must have fallen clearly below its value before the first step.

# %%
from atomic_lib.train import require_improvement

show_table(require_improvement(result), caption="Validation")

# %% [markdown]
# ## Predicted and measured
# Where `outputs/` holds an ahead-of-time report of this program for these devices (`00_preflight` with `topology`), its step time and memory stand beside those of this run, here and in `SUCCESS.json`.

# %%
from atomic_lib.preflight import predicted_and_measured, prediction_rows

prediction = predicted_and_measured(run_folder, config)
show_table(prediction_rows(prediction), caption="Predicted and measured")

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.notebook import offer_zip

run_folder.succeed(**result.summary(), **prediction)
offer_zip(run_folder)
