"""The module of `worker_extension_cls`, which each rank of an engine imports: so ranks have the slow link, too."""

from __future__ import annotations

import slow_link

slow_link.install(setattr)


class Extension: ...
