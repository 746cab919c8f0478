"""One HTML file that fetches nothing, with figures and tables: how reports and plans are written."""
