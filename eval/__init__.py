"""Phase 3: evaluation. Answers of a trained model, and their scores.

answers      greedy answers to the questions of a split
answerer     answers to other questions, about any images
predict      such answers to many questions, as rows of a file
decoding     greedy answers with each image's tokens computed once for all its questions
scores       metrics of answers beside the majority baseline
statistics   how sure a score is, and whether two scores differ
join         the answers of several runs to the same questions
compare      whether one run is better than another
submission   a run's answers as the submission of a challenge
run          evaluate a run: questions, answers, scores, files

Imports run one way: run, submission, compare -> join, predict -> answerer -> answers -> decoding, scores -> statistics.
"""
