# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Export trained models
#
# Each run's last checkpoint becomes a folder of float32 safetensors with its configuration, the hash of every tensor and the record of its training. The file is read back and compared bit for bit.
#
# | | |
# |---|---|
# | needs | finished training runs in `outputs/` |
# | wall time | `smoke` half a minute; full size was not timed |
# | quota | none: a CPU is enough |
# | inputs | `outputs/train_*-<run>/` |
# | outputs | `outputs/export-<run>/<training run>/`: `model.safetensors`, `config.json`, `export.json` |

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
# `run` chooses the parameter file `params/export/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.ExportConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" or "seeds"
sources: list = None  # training runs, as folder names under outputs/

# %%
loaded = session.read_parameters("export", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## Export

# %%
from atomic_lib.export import export
from atomic_lib.notebook import show_table

exports = export(run_folder, config)
show_table(exports, caption="Exported models")

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.notebook import offer_zip

run_folder.succeed(stop_reason="completed", models=len(exports))
offer_zip(run_folder)
