"""What is in records and their images, what is wrong with them, and which images several files share.

findings  what is audited, and what an audit finds wrong with records, images and texts
audit     the whole audit: findings, leaks, the answers of each question, the majority baseline
report    the audit as text, and as one HTML page with some images
"""
