"""What is in records and their images, what is wrong with them, and which images several files share.

findings  what is audited, and what an audit finds wrong with records, images and texts
audit     the whole audit: findings, leaks, answers of each question, majority baseline; as text and as one HTML page
"""
