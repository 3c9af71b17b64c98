//! Databases over a real broker and real nodes in this process.

mod connections;
mod evicted;
mod growing;
mod indexes;
mod joint;
mod later;
mod limits;
mod operations;
mod programs;
mod proxy;
mod recovering;
mod rig;
mod scans;
mod tables;
