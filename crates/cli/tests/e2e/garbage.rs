//! Garbage sent to any port: the connection is closed, a counter grows, nothing else happens.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Mount, Pool, PoolOptions, Up, eventually, pattern};

/// Every server closes a connection without a key sooner.
const CLOSED_WITHIN: Duration = Duration::from_secs(30);

/// Malformed input: noise, silence after half a greeting, another protocol, a frame with a wrong length.
fn garbage() -> Vec<Vec<u8>> {
    let mut lying = b"FARPOOL\x01".to_vec();
    lying.extend([0xFF; 4096]);
    vec![
        pattern(1 << 16, 1),
        b"FARPOOL".to_vec(),
        b"GET / HTTP/1.1\r\nHost: farpool\r\n\r\n".to_vec(),
        vec![0; 4096],
        lying,
    ]
}

/// Sends, and then reads until the other side closes; the answer does not matter.
fn assert_closed(mut stream: impl Read + Write, sent: &[u8]) {
    let _ = stream.write_all(sent); // it may close before it has read all
    let mut heard = [0; 4096];
    loop {
        match stream.read(&mut heard) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("still open after {CLOSED_WITHIN:?}")
            }
            Err(_) => return,
        }
    }
}

fn send_to_tcp(address: &str) {
    for sent in garbage() {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(CLOSED_WITHIN)).unwrap();
        assert_closed(stream, &sent);
    }
}

fn send_to_unix(path: &str) {
    for sent in garbage() {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(CLOSED_WITHIN)).unwrap();
        assert_closed(stream, &sent);
    }
}

fn rejected(status: &Value) -> u64 {
    status["nodes"][0]["frames_rejected"].as_u64().unwrap()
}

fn address<'a>(status: &'a Value, port: &str) -> &'a str {
    status["nodes"][0][port].as_str().unwrap()
}

#[test]
fn garbage_on_any_port_is_cut_off_and_counted_while_files_go_on() {
    let pool = Pool::start(PoolOptions { nodes: 1, ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, &[]);
    let data = pattern(3 << 20, 2);
    fs::write(mount.file("data"), &data).unwrap();

    let before = pool.status();
    send_to_tcp(address(&before, "tcp"));
    eventually("garbage over TCP is counted", || rejected(&pool.status()) > rejected(&before));
    let before = pool.status();
    send_to_unix(address(&before, "shm_socket"));
    eventually("garbage on the socket is counted", || rejected(&pool.status()) > rejected(&before));
    let before = pool.status();
    send_to_tcp(address(&before, "control"));
    eventually("garbage on the node's control port is counted", || {
        rejected(&pool.status()) > rejected(&before)
    });
    send_to_tcp(&pool.address);
    assert_eq!(pool.status()["connections_rejected"], garbage().len());

    assert_eq!(fs::read(mount.file("data")).unwrap(), data);
    fs::write(mount.file("more"), &data).unwrap();
    let after = pool.status();
    assert_eq!(after["nodes"][0]["alive"], true);
    assert_eq!(after["nodes"][0]["incarnation"], before["nodes"][0]["incarnation"]);
    assert_eq!(after["owners"].as_array().unwrap().len(), 1);
    mount.unmount();
}

#[test]
fn garbage_on_ports_with_tls_is_cut_off() {
    let up = Up::start();
    send_to_tcp(&up.address);
    assert_eq!(up.status()["connections_rejected"], garbage().len());
    send_to_tcp(address(&up.status(), "control"));
    assert_eq!(up.children().len(), 3, "all processes still run");
}
