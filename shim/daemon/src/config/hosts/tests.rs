//! Tests of the directory as a whole.

use super::*;
use nacelle_base::Chain;

/// The settings of a directory with these files: their registries and their texts.
fn read_files(files: &[(&str, &str)]) -> Result<BTreeMap<String, RegistrySettings>, String> {
    let directory = tempfile::tempdir().unwrap();
    for (registry, text) in files {
        fs::create_dir(directory.path().join(registry)).unwrap();
        fs::write(directory.path().join(registry).join("hosts.toml"), text).unwrap();
    }
    let prefix = directory.path().display().to_string();
    let clean = |file: Option<PathBuf>| file.map(|file| file.strip_prefix(&prefix).unwrap_or(&file).to_owned());
    let registries = read(directory.path()).map_err(|error| Chain(&error).to_string().replace(&prefix, "D"))?;
    Ok(registries
        .into_iter()
        .map(|(host, settings)| {
            let ca_file = clean(settings.ca_file.clone());
            (host, RegistrySettings { ca_file, ..settings })
        })
        .collect())
}

#[test]
fn mirrors_are_in_the_order_of_the_text() {
    let text = r#"
        server = "https://registry-1.docker.io"
        [host."https://z.example/v2/"]
          capabilities = ["pull", "resolve"]
          ca = "z.pem"
        [host."http://a.example:5000"]
        [host."https://push.example"]
          capabilities = ["push"]
        [host."b.example"]
          skip_verify = true
          client = [["/c.pem", "/k.pem"]]
    "#;
    let registries = read_files(&[("docker.io", text)]).unwrap();
    let mirrors = ["https://z.example", "http://a.example:5000", "https://b.example"];
    assert_eq!(
        registries["docker.io"],
        RegistrySettings { mirrors: mirrors.map(str::to_owned).into(), ..Default::default() }
    );
    assert_eq!(registries["z.example"].ca_file.as_deref(), Some(Path::new("docker.io/z.pem")));
    let b = &registries["b.example"];
    assert!(b.skip_tls_verify);
    assert_eq!(b.client_cert_file.as_deref(), Some(Path::new("/c.pem")));
    assert_eq!(b.client_key_file.as_deref(), Some(Path::new("/k.pem")));
    assert!(!registries.contains_key("push.example"));
}

#[test]
fn a_registry_has_its_own_settings() {
    let files = [
        ("r.example:5000", "ca = [\"/ca.pem\"]\nclient = \"/both.pem\"\n"),
        ("plain_80_", "server = \"http://plain:80\""),
        ("self.example", "[host.\"http://self.example\"]\n"),
        ("_default", "[host.\"https://m.example\"]\n"),
    ];
    let registries = read_files(&files).unwrap();
    let own = &registries["r.example:5000"];
    assert_eq!((own.ca_file.as_deref(), own.mirrors.len()), (Some(Path::new("/ca.pem")), 0));
    assert_eq!(own.client_cert_file, own.client_key_file);
    assert!(registries["plain:80"].http && registries["self.example"].http);
    assert_eq!(registries["self.example"].mirrors, [""; 0]);
    assert_eq!(registries["_default"].mirrors, ["https://m.example"]);
}

#[test]
fn the_files_of_containerds_documentation_are_accepted() {
    let hub = "server = \"https://docker.io\"\nca = \"/hub\"\n[host.\"https://registry-1.docker.io\"]\n";
    let registries = read_files(&[("docker.io", hub)]).unwrap();
    assert_eq!(registries.keys().collect::<Vec<_>>(), ["docker.io"]);
    assert_eq!((registries["docker.io"].mirrors.len(), registries["docker.io"].ca_file.is_some()), (0, true));
    let plain = "server = \"http://r:5000\"\n[host.\"http://r:5000\"]\nskip_verify = true\ncapabilities = []\n";
    let registries = read_files(&[("r:5000", plain), ("docker.io", "[host.\"http://r:5000\"]\nskip_verify = true")]);
    let registries = registries.unwrap();
    assert!(registries["r:5000"].http && registries["r:5000"].skip_tls_verify);
    assert_eq!(registries["docker.io"].mirrors, ["http://r:5000"]);
    // A mirror without a file of its own has the default mirrors.
    let files = [("_default", "[host.cache]\n"), ("docker.io", "[host.\"https://mirror\"]\n[host.cache]\n")];
    let registries = read_files(&files).unwrap();
    assert_eq!(
        (&registries["mirror"].mirrors[..], registries["cache"].mirrors.len()),
        (&["https://cache".to_owned()][..], 0)
    );
}

#[test]
fn what_is_not_supported_is_named() {
    for (registry, text, named) in [
        ("r", "server = \"https://other\"", "D/r/hosts.toml: server: must be the registry itself"),
        ("r", "server = \"ftp://r\"", "server: the scheme"),
        ("_default", "server = \"https://r\"", "server: _default has only hosts"),
        ("r", "[host.\"https://m/path\"]", "host.\"https://m/path\": must be a host"),
        ("r", "[host.\"https://u:p@m\"]", "hosts.toml: host.\"m\": must be a host"),
        ("r", "[host.m]\ncapabilities = [\"pull\"]", "host.\"m\".capabilities: a host has both"),
        ("r", "capabilities = [\"push\"]", "capabilities: the registry itself"),
        ("r", "[host.m]\ncapabilities = [\"pul\"]", "host.\"m\".capabilities: pull, resolve and push"),
        ("r", "[host.r]\n[host.m]", "host.\"m\": the registry itself is asked last"),
        ("r", "[host.\"http://m\"]\nca = \"/ca\"", "host.\"http://m\": ca and client need https"),
        ("r", "[host.\"https://m?x\"]", "must be a host"),
        ("r", "[host.m]\noverride_path = true", "host.\"m\".override_path"),
        ("r", "[host.m.header]\nx = \"y\"", "host.\"m\".header"),
        ("r", "dial_timeout = \"1s\"", "dial_timeout: is not supported"),
        ("r", "ca = [\"a\", \"b\"]", "ca: name one file"),
        ("r", "client = [[\"a\", \"b\"], [\"c\", \"d\"]]", "client: name one client certificate"),
        ("r", "client = [[\"a\", \"b\", \"c\"]]", "client: name a file"),
        ("r", "host = 1", "host: must be a table"),
        ("r", "skip_verfy = true", "unknown field `skip_verfy`"),
        ("r", "[host.m]\nca = 1", "cannot parse D/r/hosts.toml"),
        ("r", "= 1", "cannot parse D/r/hosts.toml"),
    ] {
        let error = read_files(&[(registry, text)]).unwrap_err();
        assert!(error.contains(named), "{text}: {error}");
    }
    let less = [("a", "[host.m]\nskip_verify = true"), ("m", "")];
    assert!(read_files(&less).unwrap_err().contains("m has other settings elsewhere"));
    let twice = [("m:5000", ""), ("m_5000_", "")];
    assert!(read_files(&twice).unwrap_err().contains("another directory is for this registry"));
    let two = [("a", "[host.m]\nskip_verify = true"), ("b", "[host.m]\nca = \"/ca\"")];
    assert!(read_files(&two).unwrap_err().contains("D/b/hosts.toml: m has other settings elsewhere"));
}

#[test]
fn certificates_without_a_file_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("r")).unwrap();
    assert!(read(directory.path()).unwrap().is_empty());
    fs::write(directory.path().join("r/ca.crt"), "").unwrap();
    let error = Chain(&read(directory.path()).unwrap_err()).to_string();
    assert!(error.contains("r/ca.crt: certificate: certificates without a hosts.toml"), "{error}");
    assert!(read(&directory.path().join("none")).is_err());
}
