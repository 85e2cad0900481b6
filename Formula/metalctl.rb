# Written by Formula/generate.py, and not by hand.
require "etc"

class Metalctl < Formula
  desc "Run language models on Apple Silicon, from a prompt to a server"
  url "file://#{File.expand_path("..", __dir__)}", using: :git, tag: "v0.1.0"
  license "Apache-2.0"
  head "file://#{File.expand_path("..", __dir__)}", using: :git, branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # The extension modules in wheels have no room for the long names that Homebrew would write into them.
  preserve_rpath

  # Resources would need the address of every wheel, and with it of one package index. Here pip takes the wheels from
  # the index that it is set up for, which may be a company's mirror, and --require-hashes makes sure that they are
  # those of Formula/requirements.txt. Nothing is compiled.
  def install
    use_pip_settings_of_the_user
    system "python3.13", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps", "--no-compile"]
    system(*pip, "--require-hashes", "--only-binary=:all:", "--requirement=Formula/requirements.txt")
    system(*pip, "--no-index", "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/metalctl"
    bash_completion.install "completions/metalctl.bash" => "metalctl"
    zsh_completion.install "completions/_metalctl"
    fish_completion.install "completions/metalctl.fish"
  end

  # Homebrew builds with another home folder and without PIP_ variables.
  def use_pip_settings_of_the_user
    home = Pathname(Etc.getpwuid.dir)
    files = [".config/pip/pip.conf", "Library/Application Support/pip/pip.conf", ".pip/pip.conf"]
    config = files.map { |name| home/name }.find(&:exist?)
    ENV["PIP_CONFIG_FILE"] = config.to_s if config
    ENV["PIP_INDEX_URL"] = ENV["HOMEBREW_PIP_INDEX_URL"] if ENV["HOMEBREW_PIP_INDEX_URL"]
  end

  service do
    run [opt_bin/"metalctl", "serve", "--cached"]
    keep_alive true
    working_dir var
    log_path var/"log/metalctl.log"
    error_log_path var/"log/metalctl.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/metalctl --version")
    aliases = shell_output("#{bin}/metalctl list --aliases --offline --json")
    assert_equal "ok", JSON.parse(aliases)["status"]
    assert_equal (bash_completion/"metalctl").read, shell_output("#{bin}/metalctl completion bash")
    assert_match "has not been pulled", shell_output("#{bin}/metalctl chat smollm2 hello --offline 2>&1", 3)
  end
end
