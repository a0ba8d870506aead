"""The trackers of `train.track`.

trackers  opened, continued, closed
runs      a training's run in TensorBoard, W&B and MLflow
"""
