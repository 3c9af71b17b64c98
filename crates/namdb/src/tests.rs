//! Databases over a real broker and real nodes in this process.

mod caring;
mod connections;
mod programs;
mod proxy;
mod rig;
mod shut_out;
mod tables;
