"""What is in records and their images, what is wrong with them, and which images several files share.

corpus    what is audited: records files, their records as single questions, and what is known of each image
findings  what an audit finds wrong with records, images and texts
audit     the whole audit: findings, leaks, the answers of each question, the majority baseline
report    the audit as text, and as one HTML page with some images
"""
