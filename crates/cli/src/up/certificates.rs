//! The certificates of a pool of `farpool up`: an authority whose key is discarded at once, and one
//! certificate with which every process proves, as server and as client, that it belongs to the pool.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use farpool_control::SERVER_NAME;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// Writes ca.pem, cert.pem and key.pem, readable by this user alone. The authority's key is not stored.
pub fn make(dir: &Path) -> Result<()> {
    let (authority, certificate, key) = issue().context("cannot make certificates")?;
    for (name, pem) in [("ca.pem", authority), ("cert.pem", certificate), ("key.pem", key)] {
        let path = dir.join(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let written = file.and_then(|mut file| file.write_all(pem.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn issue() -> Result<(String, String, String), rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, "Farpool pool");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let mut member = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    member.distinguished_name.push(DnType::CommonName, "Farpool process");
    member.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    let certificate = member.signed_by(&key, &authority)?;
    Ok((authority.pem(), certificate.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn certificates_load_and_are_readable_by_this_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path()).unwrap();
        for name in ["ca.pem", "cert.pem", "key.pem"] {
            assert_eq!(std::fs::metadata(dir.path().join(name)).unwrap().mode() & 0o777, 0o600, "{name}");
        }
        farpool_control::Tls::load(dir.path()).unwrap();
    }
}
