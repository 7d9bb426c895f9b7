"""Files from the Hugging Face hub: announced, resumable, checked. Start at `download`."""

from .download import Wanted, download, snapshot
from .places import Folder, HubCache, Place, cached_snapshot
from .remote import RemoteFile, listing, matching

__all__ = ["Folder", "HubCache", "Place", "RemoteFile", "Wanted", "cached_snapshot", "download", "listing", "matching", "snapshot"]
