//! Bodies of the fuzz targets, as plain functions, so that saved inputs run as ordinary tests too.
