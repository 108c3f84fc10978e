"""The trainers: one room per backend under one step order."""
