"""Many images: folders of them that survive a kill, split over processes and machines."""
