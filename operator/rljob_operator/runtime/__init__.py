"""What watches, decides by `reconcile`, and acts: queue, cache, requests, leadership, health. Starts in `app`."""
