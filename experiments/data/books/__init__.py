"""The corpus `prose` from its sources: books of Standard Ebooks and WikiText-2, fetched, cleaned and put together again."""
