"""Questions of a user about any images, answered by a run's model.

asked         the questions: from a records file, or the same ones about each image
pictures      images as they come from Python
features      features of any images, by key
rounds        which images are in memory together
answerer      the answers: Answerer
conversation  questions that follow the model's own answers
rows          answers as rows of JSONL and CSV
predict       answers to many questions, resumed after an interruption, with a summary
"""
