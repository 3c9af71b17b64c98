//! Files under load: fio writes at random from several processes and verifies every block.

use crate::support::{Mount, Pool, PoolOptions, run_command, tied};

fn fio(mount: &Mount, name: &str, options: &[&str]) {
    let mut command = tied("fio", ["--name", name, "--minimal"]);
    command.arg(format!("--directory={}", mount.path().display()));
    // --invalidate drops the kernel's cache before verifying, so that far memory is read.
    command.args(["--ioengine=psync", "--numjobs=4", "--size=6m", "--bsrange=4k-64k", "--bs_unaligned=0"]);
    command.args([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--invalidate=1",
        "--randrepeat=0",
    ]);
    // Otherwise fio leaves files in the working directory.
    command.arg("--verify_state_save=0");
    command.args(options);
    let output = run_command(command);
    assert!(output.status.success(), "fio {name}: {output:?}");
}

fn verify(transport: &str) {
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--transport", transport]);
    fio(&mount, "own-files", &["--rw=randwrite"]);
    fio(&mount, "mixed", &["--rw=randrw"]);
    fio(&mount, "direct", &["--rw=randwrite", "--direct=1"]);
    fio(&mount, "shared-file", &["--rw=randwrite", "--filename=shared", "--offset_increment=6m"]);
    fio(&mount, "mapped", &["--rw=randwrite", "--ioengine=mmap"]);
    mount.unmount();
}

#[test]
fn fio_verifies_what_several_processes_wrote_over_shared_memory() {
    verify("shm");
}

#[test]
fn fio_verifies_what_several_processes_wrote_over_tcp() {
    verify("tcp");
}
