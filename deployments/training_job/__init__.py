"""The one file that goes into the training job."""
