# SPDX-License-Identifier: Apache-2.0
"""What Kaggle's own command uploads: this repository's code as a dataset, notebooks as kernels.

`python -m atomic_lib.kaggle OWNER` (`make kaggle OWNER=...`) writes it; the upload is done by the
kaggle package, whose commands it prints.
"""

from atomic_lib.kaggle.package import Push, write_push

__all__ = ["Push", "write_push"]
