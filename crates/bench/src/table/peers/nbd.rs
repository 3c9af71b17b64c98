//! `nbdkit memory` over TCP, driven by fio's nbd engine.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::child::{Child, output, tied};
use crate::table::results::Figures;

/// Takes a listening socket as standard input, and passes it on in the manner of socket activation.
const ACTIVATED: &str = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec nbdkit \"$@\"";
/// Time before each measurement, not counted.
const RAMP_SECONDS: u32 = 1;

/// A running server with a memory disk.
pub struct Nbdkit {
    address: SocketAddr,
    bytes: u64,
    _child: Child,
}

impl Nbdkit {
    /// Starts it and writes the whole disk once: reading blocks that were never written would touch no
    /// memory.
    pub fn start(bytes: u64, stop: &AtomicBool) -> Result<Self> {
        let nbdkit = Self::start_empty(bytes)?;
        let mut fill = nbdkit.fio("write", "512k", 4);
        fill.arg("--output-format=json");
        output("fio", fill, stop).context("cannot fill nbdkit's memory")?;
        Ok(nbdkit)
    }

    /// Starts it with an empty disk.
    pub fn start_empty(bytes: u64) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
        let address = listener.local_addr()?;
        // As for the fabric: with BBR, the default of some systems, nbdkit is a third slower.
        rustix::net::sockopt::set_tcp_congestion(&listener, "reno").context("every kernel has TCP Reno")?;
        let mut command = tied("sh");
        command.args(["-c", ACTIVATED, "nbdkit", "--foreground", "--exit-with-parent", "memory"]);
        command.arg(bytes.to_string()).stdin(OwnedFd::from(listener)).stdout(Stdio::null());
        let child = Child::start("nbdkit", command)?;
        Ok(Nbdkit { address, bytes, _child: child })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reads for `seconds`, after a ramp.
    pub fn read(
        &self,
        how: &str,
        block: &str,
        depth: u32,
        seconds: f64,
        stop: &AtomicBool,
    ) -> Result<Figures> {
        let mut command = self.fio(how, block, depth);
        command.args(["--output-format=json", "--time_based", "--norandommap", "--randrepeat=0"]);
        command.arg(format!("--runtime={}ms", (seconds * 1000.0) as u64));
        command.arg(format!("--ramp_time={RAMP_SECONDS}"));
        let said = output("fio", command, stop)?;
        figures(&said).context("cannot parse fio's output")
    }

    fn fio(&self, how: &str, block: &str, depth: u32) -> Command {
        let mut command = tied("fio");
        command.args(["--name=nbdkit", "--ioengine=nbd", "--thread"]);
        command.arg(format!("--uri=nbd://{}", self.address)).arg(format!("--size={}", self.bytes));
        command.args([format!("--rw={how}"), format!("--bs={block}"), format!("--iodepth={depth}")]);
        command
    }
}

/// The read side of fio's JSON; warnings may precede it.
fn figures(said: &str) -> Option<Figures> {
    let json: Value = serde_json::from_str(&said[said.find('{')?..]).ok()?;
    let read = &json["jobs"][0]["read"];
    let percentile = |name: &str| Some(read["clat_ns"]["percentile"][name].as_f64()? / 1000.0);
    Some(Figures {
        iops: read["iops"].as_f64()?,
        mib_s: read["bw_bytes"].as_f64()? / f64::from(1 << 20),
        p50_us: percentile("50.000000")?,
        p99_us: percentile("99.000000")?,
        floor: None,
        ratio_p50: None,
        ratio_iops: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_json_is_found_after_its_warnings() {
        let said = r#"note: something
            {"jobs": [{"read": {"iops": 1000.5, "bw_bytes": 1048576,
             "clat_ns": {"percentile": {"50.000000": 41000, "99.000000": 99000}}}}]}"#;
        let figures = figures(said).unwrap();
        assert_eq!((figures.iops, figures.mib_s, figures.p50_us, figures.p99_us), (1000.5, 1.0, 41.0, 99.0));
        assert!(super::figures("fio: engine nbd not loadable").is_none());
    }
}
