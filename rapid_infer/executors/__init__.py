"""Where the model runs: in this process, or on several ranks in processes of their own."""
