"""Phase 3: evaluation. Answers of a trained model, and their scores.

answers      answers to the questions of a split
answerer     answers to other questions, about any images
predict      such answers to many questions, as rows of a file
decoding     greedy or sampled answers with each image's tokens computed once for all its questions
scores       metrics of answers beside the majority baseline
statistics   how sure a score is, and whether two scores differ
join         the answers of several runs to the same questions
compare      whether one run is better than another
submission   a run's answers as the submission of a challenge
run          evaluate a run: questions, answers, scores, files
samples      several answers to each question: what they score, and what training could learn from them

Imports run one way: samples -> run, submission, compare -> join, predict -> answerer -> answers -> scores -> decoding,
statistics.
"""
