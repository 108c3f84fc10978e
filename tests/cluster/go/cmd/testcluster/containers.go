package main

import (
	"os"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins"
	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
)

func containerdMain() { exitOn("containerd", containerd.App().Run(os.Args)) }

func ctrMain() { exitOn("ctr", ctr.New().Run(os.Args)) }
